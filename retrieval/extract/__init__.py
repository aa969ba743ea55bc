"""From a file of any format to sections of text, with their headings and pages."""
