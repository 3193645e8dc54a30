"""What server and client on asyncio share: one write for each turn of the event loop, deadlines, keepalive, addresses."""
