"""The state of a home: its folders, the database with its migrations, backups and fault injection."""
