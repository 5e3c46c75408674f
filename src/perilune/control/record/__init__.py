"""The record of a home: the database, its migrations, and what keeps it safe."""
