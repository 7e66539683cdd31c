"""aengine"""
