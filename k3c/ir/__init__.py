"""The intermediate representation: types, graphs, ops, text form, verifier and rewriter."""
