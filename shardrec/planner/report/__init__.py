"""Plans for people: tables, pictures and pages."""
