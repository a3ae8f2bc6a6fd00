"""`specdec plan`: what speculation will be worth on a device and a model that were not measured."""
