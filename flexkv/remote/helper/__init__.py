"""The program of the helper, the process with the clients of a unit's store. It is started as
`flexkv.remote.helper FD PARENT`, with the descriptor of a socket to the unit and the unit's process id.

A client library may hang, leak or crash. In a process of its own, it cannot harm the engine, and a SIGKILL ends
whatever it was doing. `control` receives the unit's messages, `movers` carries out gets and puts, and `prober` asks
which pages the store has.
"""
