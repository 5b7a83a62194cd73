"""Says what a run has shown: report.json, report.md and the console's summary."""
