"""The measurements of `flexkv bench`: the lanes, and what each of them is to be compared with."""
