"""What server and client on asyncio share: one write a turn of the event loop, deadlines, keepalive."""
