"""Position-independent reuse: keys of cached text, moved to where the text stands in another prompt."""
