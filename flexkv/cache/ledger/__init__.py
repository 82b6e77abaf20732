"""The manager's records: host slots, ops in flight, leases, waits and costs. Nothing here plans."""
