"""Modules added to a target model: Medusa and multi-token prediction, with their loading, saving and export."""
