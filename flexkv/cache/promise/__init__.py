"""Promises to requests: lookups, the waits and turns before a promise, and the failed loads that exclude promises."""
