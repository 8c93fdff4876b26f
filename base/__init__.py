"""Ground floor: what every other package stands on and nothing of the product's subject: errors, files, SQLite, memory."""
