"""One module per weight format: recognise, validate, unpack to the canonical linear, pack from it."""
