"""Code that all adapters share, independent of any engine: lanes and ops of a rank, names of weights, framed values."""
