"""The measurements of `flexkv bench`: the lanes, and the baselines for each of them."""
