"""Ground floor, without any of the product's subject: errors, options, files, SQLite, memory, threads."""
