"""The process with the clients of a unit's store: `flexkv.remote.helper FD PARENT`.

A client library may hang, leak or crash; here it takes nothing of the engine with it, and a SIGKILL ends whatever it
was doing. `control` takes the unit's messages, `movers` carry out gets and puts, `prober` finds which pages are there.
"""
