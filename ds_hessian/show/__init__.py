"""What people look at: tables, pictures, the page, monitor events, progress."""
