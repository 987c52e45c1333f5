"""What people have, read as documents: files, archives, arrays, folders, pipes."""
