"""Is the output still the target model's? `specdec fidelity`; `eval.fidelity.ladder` is the place to start reading."""
