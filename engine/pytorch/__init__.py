"""The engine over transformers' modelling code, for what the native engine does not know."""
