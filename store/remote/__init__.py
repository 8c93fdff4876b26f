"""The remote tier: entries on a server or in an object store that several machines share, one file a backend."""
