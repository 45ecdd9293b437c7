"""One module per architecture: names, fusions, sizes for the engine, and which linears share a scale."""
