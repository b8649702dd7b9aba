"""Groups of SugarCrepe's subsets. Standard library only: commands are printed where nothing is installed."""
GROUPS = {
    "add": ("add_att", "add_obj"), "replace": ("replace_att", "replace_obj", "replace_rel"),
    "swap": ("swap_att", "swap_obj")}
