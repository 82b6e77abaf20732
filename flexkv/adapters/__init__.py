"""One adapter per engine. An adapter turns the engine's block tables into transfer graphs. No module outside an adapter
imports that adapter's engine."""
