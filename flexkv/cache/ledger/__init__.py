"""What a manager keeps account of: host slots, ops in flight, leases, waits, costs. Nothing here plans."""
