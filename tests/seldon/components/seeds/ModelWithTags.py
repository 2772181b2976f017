class ModelWithTags(object):

    def predict(self,X,features_names):
        return X

    def tags(self,X):
        return {"system":"production"}
