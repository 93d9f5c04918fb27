"""Files on any storage: kept complete, appended to, followed; who owns a folder; records that users bring; texts by key."""
