"""Clients of stores that machines share. `base` contains the clients' contract. The clients run in a separate process,
the helper.
"""
