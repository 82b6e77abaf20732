"""What `flexkv bench` measures: the lanes, and what each of them is to be compared with."""
