"""Replicas of a sharded model: copies of the tables that are averaged, of one job or of jobs that come and go."""
