"""The process with the clients of a unit's store: `flexkv.remote.helper FD PARENT`.

A client library may hang, leak or crash. In this process it cannot harm the engine, and a SIGKILL ends whatever it was
doing. `control` receives the unit's messages, `movers` carry out gets and puts, `prober` finds which pages the store
has.
"""
