"""Files on any storage: kept complete, appended to or created by one process; records that users bring; texts by key."""
