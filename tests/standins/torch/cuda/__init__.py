from torch.cuda import memory as memory
