"""The texts that language policies are taught from: demonstrations, and responses that other policies have served."""
