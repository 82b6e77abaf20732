"""What the adapters of all engines need and no engine is part of: ownership units, names of weights, framed values."""
