"""Code that all adapters share and that depends on no engine: a rank's transfer lanes and operations, names of weights,
and the encoding of plain values as bytes for keys."""
