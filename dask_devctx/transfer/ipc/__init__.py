"""Sending values on a device to another process of this machine, by CUDA IPC, without the host.

The sender packs a value (`transfer/parcel.py`): a pickle without the bytes on a device, and a list
of those bytes. It copies them into staging memory (:mod:`.sending`), which other processes open.
The receiver allocates memory with the value's own library, opens the staging memory once
(:mod:`.receiving`), copies, and unpacks.
"""
