"""The live page over the files of a home: the report's own components, fed by server-sent events."""
