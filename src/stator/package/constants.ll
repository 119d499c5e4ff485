; The constants of a container: sets of them on a blob that is a file in memory, or given by others.
;
; A set is one piece of memory: a handle for each constant, then the address of each one's data,
; then a handle for all that runs pack of them, when it is there.

%constant = type { ptr, i64, i64, i32, i32, i32, i32, ptr, ptr, i32 }
; name, place in the blob, bytes; type, kind, dimensions, whether it was folded; sizes, strides;
; kind of device
%mapping = type { ptr, i64, i64 }  ; start and bytes of a file in memory, tensors that are on it
%pair = type { ptr, ptr }  ; name and tensor

declare i32 @strcmp(ptr, ptr) nonlazybind
declare i32 @open(ptr, i32, ...) nonlazybind
declare i32 @close(i32) nonlazybind
declare i64 @lseek(i32, i64, i32) nonlazybind
declare i32 @aoti_torch_new_tensor_handle(ptr, ptr) nonlazybind
declare i32 @aoti_torch__alloc_from_pool(ptr, i64, i32, i64, ptr, ptr, ptr) nonlazybind

; --- sets of constants ---

define internal ptr @new_set() {
  %count = load i64, ptr @constant_count
  %words = mul i64 %count, 2
  %packed = load i64, ptr @packed_count
  %all = add i64 %words, %packed
  %more = add i64 %all, 1
  %set = call ptr @calloc(i64 %more, i64 8)
  ret ptr %set
}

define internal void @free_set(ptr %set) {
  %none = icmp eq ptr %set, null
  br i1 %none, label %done, label %drop
drop:
  %count = load i64, ptr @constant_count
  call void @stator_drop_handles(ptr %set, i64 %count)
  %words = mul i64 %count, 2
  %packed_at = getelementptr ptr, ptr %set, i64 %words
  %packed = load i64, ptr @packed_count
  call void @stator_drop_handles(ptr %packed_at, i64 %packed)
  call void @free(ptr %set)
  br label %done
done:
  ret void
}

; Write the addresses of all data behind the handles.
define internal void @note_addresses(ptr %set) {
entry:
  %count = load i64, ptr @constant_count
  br label %head
head:
  %i = phi i64 [ 0, %entry ], [ %next, %body ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %body, label %done
body:
  %handle_at = getelementptr ptr, ptr %set, i64 %i
  %handle = load ptr, ptr %handle_at
  %behind = add i64 %count, %i
  %data_at = getelementptr ptr, ptr %set, i64 %behind
  call i32 @torch_get_mutable_data_ptr(ptr %handle, ptr %data_at)
  %next = add i64 %i, 1
  br label %head
done:
  ret void
}

; Torch lets go of a tensor on a mapping; the last one takes the mapping along.
define internal void @leave_mapping(ptr %data, ptr %mapping) {
  %left_at = getelementptr %mapping, ptr %mapping, i64 0, i32 2
  %before = atomicrmw sub ptr %left_at, i64 1 acq_rel
  %last = icmp eq i64 %before, 1
  br i1 %last, label %unmap, label %done
unmap:
  %start = load ptr, ptr %mapping
  %bytes_at = getelementptr %mapping, ptr %mapping, i64 0, i32 1
  %bytes = load i64, ptr %bytes_at
  call i32 @munmap(ptr %start, i64 %bytes)
  call void @free(ptr %mapping)
  br label %done
done:
  ret void
}

@one = internal constant i64 1
@blob_text = text "the weights"

; A tensor of bytes on the program's device, with all that is in the blob; a CPU needs none.
define internal i32 @copy_to_device(ptr %blob, i32 %device, ptr %pool_at) {
  %near_at = alloca ptr
  %size_at = alloca i64
  store ptr null, ptr %near_at
  store ptr null, ptr %pool_at
  %kind = load i32, ptr @device_type
  %far = icmp ne i32 %kind, 0
  br i1 %far, label %make, label %good
make:
  %bytes = load i64, ptr @blob_bytes
  store i64 %bytes, ptr %size_at
  %made = call i32 @aoti_torch_empty_strided(i64 1, ptr %size_at, ptr @one, i32 0, i32 %kind, i32 %device, ptr %pool_at)
  %is_made = icmp eq i32 %made, 0
  br i1 %is_made, label %look, label %fail
look:
  %seen = call i32 @torch_from_blob(ptr %blob, i64 1, ptr %size_at, ptr @one, i64 0, i32 0, i32 0, i32 -1, ptr %near_at, i32 0, ptr null, i64 0, ptr null, ptr null)
  %is_seen = icmp eq i32 %seen, 0
  br i1 %is_seen, label %copy, label %fail
copy:
  %pool = load ptr, ptr %pool_at
  %near = load ptr, ptr %near_at
  %copied = call i32 @aoti_torch_copy_(ptr %pool, ptr %near, i32 0)
  call void @stator_drop_handle(ptr %near_at)
  %is_copied = icmp eq i32 %copied, 0
  br i1 %is_copied, label %good, label %fail
good:
  ret i32 0
fail:
  call void @stator_step_failed(ptr @blob_text)
  call void @stator_drop_handle(ptr %pool_at)
  ret i32 1
}

; A set of constants as they lie in a blob, which %mapping owns (null: somebody else does).  Those
; of another device lie there in one copy of the blob, which goes with the last of them.
define internal ptr @set_on_blob(ptr %blob, ptr %mapping, i32 %device) {
entry:
  %pool_at = alloca ptr
  %set = call ptr @new_set()
  %count = load i64, ptr @constant_count
  %owned = icmp ne ptr %mapping, null
  %deleter = select i1 %owned, ptr @leave_mapping, ptr null
  %there = call i32 @copy_to_device(ptr %blob, i32 %device, ptr %pool_at)
  %is_there = icmp eq i32 %there, 0
  br i1 %is_there, label %start, label %fail
start:
  %pool = load ptr, ptr %pool_at
  br label %head
head:
  %i = phi i64 [ 0, %start ], [ %next, %after ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %body, label %done
body:
  %it = getelementptr %constant, ptr @constants, i64 %i
  %place_at = getelementptr %constant, ptr %it, i64 0, i32 1
  %place = load i64, ptr %place_at
  %data = getelementptr i8, ptr %blob, i64 %place
  %dtype_at = getelementptr %constant, ptr %it, i64 0, i32 3
  %dtype = load i32, ptr %dtype_at
  %dims_at = getelementptr %constant, ptr %it, i64 0, i32 5
  %few_dims = load i32, ptr %dims_at
  %dims = sext i32 %few_dims to i64
  %sizes_at = getelementptr %constant, ptr %it, i64 0, i32 7
  %sizes = load ptr, ptr %sizes_at
  %strides_at = getelementptr %constant, ptr %it, i64 0, i32 8
  %strides = load ptr, ptr %strides_at
  %slot = getelementptr ptr, ptr %set, i64 %i
  %kind_at = getelementptr %constant, ptr %it, i64 0, i32 9
  %kind = load i32, ptr %kind_at
  %near = icmp eq i32 %kind, 0
  br i1 %near, label %on_blob, label %in_pool
in_pool:
  %taken = call i32 @aoti_torch__alloc_from_pool(ptr %pool, i64 %place, i32 %dtype, i64 %dims, ptr %sizes, ptr %strides, ptr %slot)
  %is_taken = icmp eq i32 %taken, 0
  br i1 %is_taken, label %after, label %fail
on_blob:
  %code = call i32 @torch_from_blob(ptr %data, i64 %dims, ptr %sizes, ptr %strides, i64 0, i32 %dtype, i32 0, i32 -1, ptr %slot, i32 0, ptr null, i64 0, ptr %deleter, ptr %mapping)
  %good = icmp eq i32 %code, 0
  br i1 %good, label %count_one, label %fail
count_one:
  br i1 %owned, label %hold, label %after
hold:
  %left_at = getelementptr %mapping, ptr %mapping, i64 0, i32 2
  atomicrmw add ptr %left_at, i64 1 acq_rel
  br label %after
after:
  %next = add i64 %i, 1
  br label %head
fail:
  call void @stator_drop_handle(ptr %pool_at)
  call void @free_set(ptr %set)
  ret ptr null
done:
  call void @stator_drop_handle(ptr %pool_at)
  call void @note_addresses(ptr %set)
  ret ptr %set
}

@cannot_open = text "the file of weights cannot be opened"
@cannot_map = text "the file of weights cannot be mapped"
@too_short = text "the file of weights is cut short"

; The blob at %offset of a file, in memory; null: it is not there, and the message says why.
define internal ptr @map_file(ptr %path, i64 %offset) {
  %bytes = load i64, ptr @blob_bytes
  %file = call i32 (ptr, i32, ...) @open(ptr %path, i32 524288)  ; to read, closed in children
  %bad = icmp slt i32 %file, 0
  br i1 %bad, label %not_open, label %measure
measure:
  %length = call i64 @lseek(i32 %file, i64 0, i32 2)
  %needed = add i64 %offset, %bytes
  %enough = icmp sge i64 %length, %needed
  br i1 %enough, label %map, label %short
map:
  %start = call ptr @mmap(ptr null, i64 %bytes, i32 3, i32 2, i32 %file, i64 %offset)
  call i32 @close(i32 %file)
  %address = ptrtoint ptr %start to i64
  %failed = icmp eq i64 %address, -1
  br i1 %failed, label %not_mapped, label %note
note:
  %mapping = call ptr @calloc(i64 1, i64 24)
  store ptr %start, ptr %mapping
  %bytes_at = getelementptr %mapping, ptr %mapping, i64 0, i32 1
  store i64 %bytes, ptr %bytes_at
  %left_at = getelementptr %mapping, ptr %mapping, i64 0, i32 2
  store i64 1, ptr %left_at
  ret ptr %mapping
not_open:
  call i32 @say_of(ptr %path, ptr @cannot_open)
  ret ptr null
not_mapped:
  call i32 @say_of(ptr %path, ptr @cannot_map)
  ret ptr null
short:
  call i32 @close(i32 %file)
  call i32 @say_of(ptr %path, ptr @too_short)
  ret ptr null
}

; --- other constants ---

@no_constant = text "the program has no constant of that name (freezing folds those that it has into others)"
@not_given = text "the constant is missing, and all were asked for"
@other_type_text = text "the constant is of another type"
@other_size_text = text "the constant is of another size"
@other_place_text = text "the constant is on another device, and its memory cannot be used"
@other_stride_text = text "the constant has other strides, and its memory cannot be used as it is"

; The number of a constant; -1: there is none of that name.
define internal i64 @constant_named(ptr %name) {
entry:
  %count = load i64, ptr @constant_count
  br label %head
head:
  %i = phi i64 [ 0, %entry ], [ %next, %body ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %body, label %none
body:
  %it = getelementptr %constant, ptr @constants, i64 %i
  %its_name = load ptr, ptr %it
  %differs = call i32 @strcmp(ptr %its_name, ptr %name)
  %same = icmp eq i32 %differs, 0
  %next = add i64 %i, 1
  br i1 %same, label %found, label %head
found:
  ret i64 %i
none:
  ret i64 -1
}

; Whether two rows of numbers are equal.
define internal i1 @same_numbers(ptr %first, ptr %second, i64 %count) {
entry:
  br label %head
head:
  %i = phi i64 [ 0, %entry ], [ %next, %body ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %body, label %same
body:
  %first_at = getelementptr i64, ptr %first, i64 %i
  %second_at = getelementptr i64, ptr %second, i64 %i
  %one = load i64, ptr %first_at
  %other = load i64, ptr %second_at
  %equal = icmp eq i64 %one, %other
  %next = add i64 %i, 1
  br i1 %equal, label %head, label %differs
same:
  ret i1 true
differs:
  ret i1 false
}

; A constant of somebody's tensor, into %slot: that tensor itself, or a copy that lies as ours did.
define internal i32 @take_constant(i64 %number, ptr %tensor, ptr %slot, i1 %itself, i32 %device) {
entry:
  %word = alloca i64
  %list_at = alloca ptr
  %it = getelementptr %constant, ptr @constants, i64 %number
  %name = load ptr, ptr %it
  %dtype_at = getelementptr %constant, ptr %it, i64 0, i32 3
  %dtype = load i32, ptr %dtype_at
  %dims_at = getelementptr %constant, ptr %it, i64 0, i32 5
  %few_dims = load i32, ptr %dims_at
  %dims = sext i32 %few_dims to i64
  %sizes_at = getelementptr %constant, ptr %it, i64 0, i32 7
  %sizes = load ptr, ptr %sizes_at
  %strides_at = getelementptr %constant, ptr %it, i64 0, i32 8
  %strides = load ptr, ptr %strides_at
  call i32 @aoti_torch_get_dtype(ptr %tensor, ptr %word)
  %its_type = load i32, ptr %word
  %same_type = icmp eq i32 %its_type, %dtype
  br i1 %same_type, label %rank, label %bad_type
bad_type:
  %type_code = call i32 @say_of(ptr %name, ptr @other_type_text)
  ret i32 %type_code
rank:
  call i32 @aoti_torch_get_dim(ptr %tensor, ptr %word)
  %its_dims = load i64, ptr %word
  %same_dims = icmp eq i64 %its_dims, %dims
  br i1 %same_dims, label %size, label %bad_size
size:
  call i32 @aoti_torch_get_sizes(ptr %tensor, ptr %list_at)
  %its_sizes = load ptr, ptr %list_at
  %same_size = call i1 @same_numbers(ptr %its_sizes, ptr %sizes, i64 %dims)
  br i1 %same_size, label %how, label %bad_size
bad_size:
  %size_code = call i32 @say_of(ptr %name, ptr @other_size_text)
  ret i32 %size_code
how:
  %kind_at = getelementptr %constant, ptr %it, i64 0, i32 9
  %kind = load i32, ptr %kind_at
  br i1 %itself, label %where, label %copy
where:
  call i32 @aoti_torch_get_device_type(ptr %tensor, ptr %word)
  %its_kind = load i32, ptr %word
  %same_kind = icmp eq i32 %its_kind, %kind
  br i1 %same_kind, label %stride, label %bad_place
bad_place:
  %place_code = call i32 @say_of(ptr %name, ptr @other_place_text)
  ret i32 %place_code
stride:
  call i32 @aoti_torch_get_strides(ptr %tensor, ptr %list_at)
  %its_strides = load ptr, ptr %list_at
  %same_stride = call i1 @same_numbers(ptr %its_strides, ptr %strides, i64 %dims)
  br i1 %same_stride, label %share, label %bad_stride
bad_stride:
  %stride_code = call i32 @say_of(ptr %name, ptr @other_stride_text)
  ret i32 %stride_code
share:
  %shared = call i32 @aoti_torch_new_tensor_handle(ptr %tensor, ptr %slot)
  ret i32 %shared
copy:
  %made = call i32 @aoti_torch_empty_strided(i64 %dims, ptr %sizes, ptr %strides, i32 %dtype, i32 %kind, i32 %device, ptr %slot)
  %is_made = icmp eq i32 %made, 0
  br i1 %is_made, label %fill, label %fail
fill:
  %fresh = load ptr, ptr %slot
  %code = call i32 @aoti_torch_copy_(ptr %fresh, ptr %tensor, i32 0)
  %copied = icmp eq i32 %code, 0
  br i1 %copied, label %done, label %fail
done:
  ret i32 0
fail:
  call void @stator_step_failed(ptr %name)
  ret i32 1
}

; Whether two constants share memory, and whether they are one under two names.
define internal { i1, i1 } @compare_places(i64 %first, i64 %second) {
entry:
  %a = getelementptr %constant, ptr @constants, i64 %first
  %b = getelementptr %constant, ptr @constants, i64 %second
  %a_place_at = getelementptr %constant, ptr %a, i64 0, i32 1
  %b_place_at = getelementptr %constant, ptr %b, i64 0, i32 1
  %a_place = load i64, ptr %a_place_at
  %b_place = load i64, ptr %b_place_at
  %a_bytes_at = getelementptr %constant, ptr %a, i64 0, i32 2
  %b_bytes_at = getelementptr %constant, ptr %b, i64 0, i32 2
  %a_bytes = load i64, ptr %a_bytes_at
  %b_bytes = load i64, ptr %b_bytes_at
  %a_end = add i64 %a_place, %a_bytes
  %b_end = add i64 %b_place, %b_bytes
  %a_before = icmp slt i64 %a_place, %b_end
  %b_before = icmp slt i64 %b_place, %a_end
  %meet = and i1 %a_before, %b_before
  %same_place = icmp eq i64 %a_place, %b_place
  %a_type_at = getelementptr %constant, ptr %a, i64 0, i32 3
  %b_type_at = getelementptr %constant, ptr %b, i64 0, i32 3
  %a_type = load i32, ptr %a_type_at
  %b_type = load i32, ptr %b_type_at
  %same_type = icmp eq i32 %a_type, %b_type
  %a_dims_at = getelementptr %constant, ptr %a, i64 0, i32 5
  %b_dims_at = getelementptr %constant, ptr %b, i64 0, i32 5
  %a_dims = load i32, ptr %a_dims_at
  %b_dims = load i32, ptr %b_dims_at
  %same_dims = icmp eq i32 %a_dims, %b_dims
  %of_a_kind = and i1 %same_type, %same_dims
  %alike = and i1 %same_place, %of_a_kind
  br i1 %alike, label %numbers, label %done
numbers:
  %dims = sext i32 %a_dims to i64
  %a_sizes_at = getelementptr %constant, ptr %a, i64 0, i32 7
  %b_sizes_at = getelementptr %constant, ptr %b, i64 0, i32 7
  %a_sizes = load ptr, ptr %a_sizes_at
  %b_sizes = load ptr, ptr %b_sizes_at
  %same_sizes = call i1 @same_numbers(ptr %a_sizes, ptr %b_sizes, i64 %dims)
  %a_strides_at = getelementptr %constant, ptr %a, i64 0, i32 8
  %b_strides_at = getelementptr %constant, ptr %b, i64 0, i32 8
  %a_strides = load ptr, ptr %a_strides_at
  %b_strides = load ptr, ptr %b_strides_at
  %same_strides = call i1 @same_numbers(ptr %a_strides, ptr %b_strides, i64 %dims)
  %as_large = and i1 %same_sizes, %same_strides
  br label %done
done:
  %one = phi i1 [ false, %entry ], [ %as_large, %numbers ]
  %half = insertvalue { i1, i1 } poison, i1 %meet, 0
  %both = insertvalue { i1, i1 } %half, i1 %one, 1
  ret { i1, i1 } %both
}

@shares_text = text "the constant shares memory with another that is given, and must be given too"

; What is given for one name goes for its other names: for the program, they may be one.
define internal i32 @give_to_other_names(ptr %set, i64 %number) {
entry:
  %count = load i64, ptr @constant_count
  %given_at = getelementptr ptr, ptr %set, i64 %number
  %given = load ptr, ptr %given_at
  br label %head
head:
  %i = phi i64 [ 0, %entry ], [ %next, %after ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %body, label %done
body:
  %slot = getelementptr ptr, ptr %set, i64 %i
  %own = load ptr, ptr %slot
  %found = call { i1, i1 } @compare_places(i64 %number, i64 %i)
  %meet = extractvalue { i1, i1 } %found, 0
  %itself = icmp eq i64 %number, %i
  %apart = xor i1 %meet, true
  %skip = or i1 %apart, %itself
  br i1 %skip, label %after, label %shared
shared:
  %one = extractvalue { i1, i1 } %found, 1
  br i1 %one, label %give, label %ask
give:
  call void @stator_drop_handle(ptr %slot)
  call i32 @aoti_torch_new_tensor_handle(ptr %given, ptr %slot)
  br label %after
ask:
  %free = icmp eq ptr %own, null
  br i1 %free, label %refuse, label %after
after:
  %next = add i64 %i, 1
  br label %head
refuse:
  %it = getelementptr %constant, ptr @constants, i64 %i
  %name = load ptr, ptr %it
  %code = call i32 @say_of(ptr %name, ptr @shares_text)
  ret i32 %code
done:
  ret i32 0
}

; A set with some constants given; the others are those of %base, unless all must be given.
define internal ptr @set_of_pairs(ptr %base, ptr %pairs, i64 %pair_count, i1 %full, i1 %itself, i32 %device) {
entry:
  %set = call ptr @new_set()
  %count = load i64, ptr @constant_count
  br label %given_head
given_head:
  %i = phi i64 [ 0, %entry ], [ %next_i, %taken ]
  %more = icmp slt i64 %i, %pair_count
  br i1 %more, label %given, label %names_head
given:
  %pair = getelementptr %pair, ptr %pairs, i64 %i
  %name = load ptr, ptr %pair
  %tensor_at = getelementptr %pair, ptr %pair, i64 0, i32 1
  %tensor = load ptr, ptr %tensor_at
  %number = call i64 @constant_named(ptr %name)
  %known = icmp sge i64 %number, 0
  br i1 %known, label %take, label %unknown
unknown:
  call i32 @say_of(ptr %name, ptr @no_constant)
  br label %fail
take:
  %slot = getelementptr ptr, ptr %set, i64 %number
  call void @stator_drop_handle(ptr %slot)
  %code = call i32 @take_constant(i64 %number, ptr %tensor, ptr %slot, i1 %itself, i32 %device)
  %good = icmp eq i32 %code, 0
  br i1 %good, label %taken, label %fail
taken:
  %next_i = add i64 %i, 1
  br label %given_head
names_head:
  %j = phi i64 [ 0, %given_head ], [ %next_j, %named ]
  %more_names = icmp slt i64 %j, %pair_count
  br i1 %more_names, label %names, label %rest_head
names:
  %again = getelementptr %pair, ptr %pairs, i64 %j
  %given_name = load ptr, ptr %again
  %given_number = call i64 @constant_named(ptr %given_name)
  %told = call i32 @give_to_other_names(ptr %set, i64 %given_number)
  %all_told = icmp eq i32 %told, 0
  br i1 %all_told, label %named, label %fail
named:
  %next_j = add i64 %j, 1
  br label %names_head
rest_head:
  %k = phi i64 [ 0, %names_head ], [ %next_k, %kept ]
  %left = icmp slt i64 %k, %count
  br i1 %left, label %rest, label %done
rest:
  %own_at = getelementptr ptr, ptr %set, i64 %k
  %own = load ptr, ptr %own_at
  %has_own = icmp ne ptr %own, null
  br i1 %has_own, label %kept, label %old
old:
  br i1 %full, label %missing, label %keep
missing:
  %it = getelementptr %constant, ptr @constants, i64 %k
  %its_name = load ptr, ptr %it
  call i32 @say_of(ptr %its_name, ptr @not_given)
  br label %fail
keep:
  %base_at = getelementptr ptr, ptr %base, i64 %k
  %base_handle = load ptr, ptr %base_at
  call i32 @aoti_torch_new_tensor_handle(ptr %base_handle, ptr %own_at)
  br label %kept
kept:
  %next_k = add i64 %k, 1
  br label %rest_head
fail:
  call void @free_set(ptr %set)
  ret ptr null
done:
  call void @note_addresses(ptr %set)
  ret ptr %set
}
