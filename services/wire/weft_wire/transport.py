"""What server and client on asyncio share."""
