"""The measurements of `flexkv bench`: the transfer lanes, and the methods with which each lane is compared."""
