"""What confines a program: namespaces, Landlock, filters of system calls, folders."""
