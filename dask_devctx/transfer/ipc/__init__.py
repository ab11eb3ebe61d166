"""Values on a device to another process of this machine, by CUDA IPC and without the host.

A value is packed (:mod:`.parcel`): a pickle without the bytes that are on a device, and a list of
those. They are copied into staging memory (:mod:`.staging`), which other processes may open. The
receiver allocates with the value's own library (:mod:`.frames`), opens the staging memory once
(:mod:`.opened`), copies, and unpacks. Nothing here knows how the two talk to each other.
"""
