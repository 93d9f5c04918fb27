"""Environments of BrowserGym (https://github.com/ServiceNow/BrowserGym), played in a process of their own."""
