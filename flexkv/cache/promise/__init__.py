"""What a request may be promised: lookups, the waits and turns before a promise, and what failed loads forbid."""
