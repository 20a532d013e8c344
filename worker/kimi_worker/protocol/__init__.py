"""Every message that crosses a process, as msgspec structs in MessagePack."""
