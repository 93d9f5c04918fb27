"""The loop of every training worker: collect, update, report, checkpoint. It knows no Ray; callers pass functions in."""
