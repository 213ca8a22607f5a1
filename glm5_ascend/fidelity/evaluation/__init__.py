"""How far a checkpoint is from its source: teacher-forced metrics, streamed."""
