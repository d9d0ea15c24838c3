"""Recovery of an attention mask's predicate from the operators that compute the mask."""
