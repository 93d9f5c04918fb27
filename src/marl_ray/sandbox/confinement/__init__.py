"""Confinement of a program: namespaces, Landlock, system call filters and run folders."""
