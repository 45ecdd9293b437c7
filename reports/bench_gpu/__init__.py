"""Speed of the cuda backend beside its floors and its peers: kernels, then whole engines on random models."""
